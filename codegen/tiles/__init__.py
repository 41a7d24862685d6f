"""Tile numbers, one module per kernel family, each number with the reason it was chosen for."""
