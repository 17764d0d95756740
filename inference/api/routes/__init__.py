"""The cold routes, one file per subject: they translate between HTTP and the authority and decide nothing."""
