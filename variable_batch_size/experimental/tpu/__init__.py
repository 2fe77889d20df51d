"""``vbs tpu``: what the TPU compiler says about a training, on a machine without a TPU."""
