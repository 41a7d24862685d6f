"""Adapters for other libraries, a module for each: ``docs/clients`` has their use.

``equinox`` and ``haiku`` import their library, because they have subclasses of its layers.
``levanter`` and ``maxtext`` import nothing until they are called.
"""
