"""``report.html``: everything an artifact records, in one file that a browser opens by itself."""
