"""The accumulators with the options that tests construct them with."""

from functools import partial

from variable_batch_size.optim.gradients.buckets import BucketAccumulator
from variable_batch_size.optim.gradients.traced import TracedAccumulator

BucketViewAccumulator = partial(BucketAccumulator, gradient_as_bucket_view=True)
ExactBucketAccumulator = partial(BucketAccumulator, exact=True)
ExactTracedAccumulator = partial(TracedAccumulator, exact=True)
