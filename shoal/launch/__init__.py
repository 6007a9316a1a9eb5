"""How ranks come to be: by `local` on this machine, or by a launcher that `environments` recognises."""
