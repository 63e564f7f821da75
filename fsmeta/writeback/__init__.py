"""Write-back: commits that wait in a journal, their overlay, and replay in order."""
