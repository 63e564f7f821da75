"""Write-back: the store that holds commits back, what is asked of them, and replay in order."""
