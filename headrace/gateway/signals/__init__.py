"""The ways in which users judge sessions, and how a judgement becomes a record."""
