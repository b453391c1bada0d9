"""The file format of training state: tensors, manifest, digests, slices. No torch, no I/O."""
