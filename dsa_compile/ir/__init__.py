"""Graphs as data: regions, their JSON form and their printed form."""
