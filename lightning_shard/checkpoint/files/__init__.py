"""Files and folders of checkpoints: written so that they are never half there, read with checks.

    temporary beside its place ──> fsync ──> rename ──> fsync of the folder
    .last.ckpt.<writer>.part                 last.ckpt

On object stores nothing is renamed: there an object is there when all of it has arrived, and a
folder when its index is, which names the files of one edition.
"""
