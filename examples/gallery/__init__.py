"""Functions of scores and masks from the literature, each a few lines of JAX.

Each function returns an argument of ``dot_product_attention``: a function of scores for
``score_mod=`` (:mod:`gallery.scores`) or a mask for ``mask=`` (:mod:`gallery.windows`,
:mod:`gallery.structure`).
"""
