// Package keeper keeps open files, and what is known of them, for a process that may die.
//
// A file descriptor of GPU memory keeps the memory, with every byte, whether or not a process has
// it mapped. So a [Keeper] is a process that does nothing but hold descriptors: it opens no driver
// and no network, and knows nothing of what it keeps. Another process, the broker, does all the
// work, and gives what must survive it to the keeper first ([Client.Write]). The next one gets it
// back ([Client.All]).
//
// [Keeper.Run] starts the other process, and starts it again whenever it ends. The keeper itself
// can be replaced by a later version of its program, without closing a file: [Keeper.Exec]. A service manager
// keeps the files while the service is started anew: [Keeper.Store].
//
// # Trust
//
// A keeper serves its own children, and believes them: it checks the form of what they send and
// bounds it, and nothing else.
package keeper
