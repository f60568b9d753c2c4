"""Trained miniatures: a small target and an EAGLE-3 drafter for it, so that a real server accepts drafts for a reason.

Needs torch, numpy, safetensors and tqdm (`requirements.txt` here); no other part of the project imports it.
"""
