"""Hosts: one thin file for each trainer that users already have. Import the one you need."""
