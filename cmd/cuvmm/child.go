package main

import "io"

// importTrial is the command of the child process that doctor imports memory in.
const importTrial = "import-trial"

func importInChild(io.Writer, host) int { return exitUsage }
