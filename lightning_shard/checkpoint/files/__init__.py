"""Files and folders of checkpoints: written so that they are never half there, read with checks.

    temporary beside its place ──> fsync ──> rename ──> fsync of the folder
    .last.ckpt.<writer>.part                 last.ckpt

    a file, a folder, all or nothing           new (new_file, new_folder)
    a folder that ranks write into             open_folder
    where a path lies                          places
    what a killed writer has left              parts
    why something cannot be written            failures
    checksums of files beside each other       checksums, joined_crc
    torch's archive: its records               torch_archive (writes), stored_archive
    a checkpoint file, with errors by name     reading

On object stores nothing is renamed: there an object is there when all of it has arrived, and a
folder when its index is, which names the files of one edition.
"""
