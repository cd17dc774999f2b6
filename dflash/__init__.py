"""DFlash: trains block-diffusion draft models for speculative decoding.

Importing this package imports nothing else; each part is imported where it is used, so that
``dflash.compile`` needs torch alone.
"""

__version__ = "0.1.0"
