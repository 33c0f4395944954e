"""An operator's commands that show and change the version that users get."""
