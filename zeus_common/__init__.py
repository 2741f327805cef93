"""What several of the packages use and the protocol does without: files, text, options, reports."""
