"""``vbs recommend``: a rule for a trace, from short branches of one training."""
