"""Foreign packages through their own API: trained, used, saved and loaded under each strategy.

    declared.py     what a use of a package is, and the strategies
    batches.py      batches of the samples in their order
    molecules.py    chemprop
    series.py       darts, neuralforecast
    tables.py       pytorch-tabular
    cells.py        scvi-tools
    pictures.py     diffusers
    graphs.py       torch-geometric
    texts.py        litgpt, x-transformers
    page.py         the table of the documentation

Each use is compared with what one device does, or the strategy refuses it by name.
`test_foreign.py` tries every cell of the table. No package is imported before its use runs.
"""
