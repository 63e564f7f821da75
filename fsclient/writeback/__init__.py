"""Write-back on a mount: the journal's directory, the publisher and the packer."""
