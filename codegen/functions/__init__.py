"""Users' functions of scores and masks as programs, and their CUDA source."""
