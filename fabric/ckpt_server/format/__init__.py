"""What a file of training state looks like: tensors, manifest, digests, slices. No torch, no I/O."""
