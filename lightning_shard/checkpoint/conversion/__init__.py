"""Checkpoints out of and into other formats, one tensor at a time.

a sharded folder ─┐                                    ┌─> .ckpt      Lightning's, whole
a .ckpt, a .pt   ─┼─> nested containers with tensors  ─┼─> .pt        a `state_dict`
safetensors      ─┘   of which nothing has been read   ├─> .safetensors
                                                       └─> a folder in Hugging Face layout
"""
