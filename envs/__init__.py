"""The environments that ship with molt_gym; their ids are registered by string, so none is imported before it is made.

An env here knows `molt_gym` and its own siblings, and nothing of the trainers: they meet through ids.
"""
