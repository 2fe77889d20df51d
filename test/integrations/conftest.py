"""How the frameworks are to be imported, here and in processes that are started from here."""

import os

os.environ["USE_TORCH_XLA"] = "0"  # else Accelerate and Transformers take XLA wherever torch_xla is installed
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["KERAS_BACKEND"] = "torch"
