"""The base of every room: errors, randomness, configuration, parts, files. Imports nothing of ours."""
