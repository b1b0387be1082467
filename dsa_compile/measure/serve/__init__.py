"""Measuring servers of OpenAI's API from outside, without torch."""
