"""Recorded programs as ONNX models; needs the packages of the extra ``onnx``."""
