package trace

var ReadAll = readAll
