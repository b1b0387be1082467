"""Finding the wrong rewrite: programs run at any stage, sites verified, pipelines bisected."""
