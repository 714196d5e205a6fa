package publish

// NewServerForOne makes a server that has room for one client.
func NewServerForOne() *Server {
	most := serverLimits
	most.sessions = 1
	return newServer(ServerOptions{}, most)
}
