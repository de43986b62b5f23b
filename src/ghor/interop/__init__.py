"""Convert weights of other libraries to declared ones, at their present values; read and write peft's files.

Those libraries are not imported: whoever has a model with their weights has imported them already. peft's
files are read and written by safetensors, which peft needs, too.
"""

from ghor.interop.libraries import from_geoopt, from_parametrized
from ghor.interop.peft import load_peft, save_peft

__all__ = ["from_geoopt", "from_parametrized", "load_peft", "save_peft"]
