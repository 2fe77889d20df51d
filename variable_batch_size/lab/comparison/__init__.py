"""``vbs compare``: which learning-rate rule survives a changing batch size, as one experiment and one page."""
