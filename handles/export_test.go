package handles

// Expire ends a lease as its deadline does.
func Expire(l *Lease) { l.expire() }
