"""Expert parallel: each rank has some of a mixture's experts, and tokens go to those of theirs.

`finding` knows the mixtures, `split` which rank has which experts, `shared_experts` changes the
mixtures until they are restored, and `batched` and `listed` say what a call does.
"""
