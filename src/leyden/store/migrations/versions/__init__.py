"""One file per revision, frozen once released."""
