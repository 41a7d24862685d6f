"""Pictures of masks and of scores, with the tiles that the kernels compute.

``of_mask`` makes the ``Picture`` of a mask. ``tile_classes`` decides what a kernel does with each
tile, as its device code does. ``text`` and ``figure`` draw a picture in a terminal and with
matplotlib.
"""

from jax_memeff._call.mask.pictures.picture import Picture as Picture
