"""What passes did to a program, read back from an artifact as plain data; torch is not needed."""
