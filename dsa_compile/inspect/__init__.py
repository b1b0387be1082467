"""Records of what passes did to a program, read from an artifact as plain data without torch."""
