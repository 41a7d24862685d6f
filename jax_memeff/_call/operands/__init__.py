"""The arrays of a call (``arrays``), the table that describes them (``table``), and those that have
gradients (``gradients``).
"""
