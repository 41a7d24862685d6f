"""Functions of scores and masks from the literature, each a few lines of JAX.

The functions here make what ``dot_product_attention`` takes: functions of scores for ``score_mod=``
(:mod:`gallery.scores`), and masks for ``mask=`` (:mod:`gallery.windows`, :mod:`gallery.structure`).
"""
