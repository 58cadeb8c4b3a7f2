"""Checkpoints out of and into other formats, one tensor at a time.

a sharded folder ─┐                                    ┌─> .ckpt      Lightning's, whole
a .ckpt, a .pt   ─┼─> nested containers with tensors  ─┼─> .pt        a `state_dict`
safetensors      ─┘   of which nothing has been read   ├─> .safetensors
                                                       └─> a folder in Hugging Face layout

what an unread tensor is           unread
where it lies                      archive, safetensors_files, and `sharded.folder`
any path as a checkpoint           source, folder_source
what is written                    targets, hugging_face
all of it                          consolidating
what there is to say of a path     description
weights into a module              loading
"""
