module github.com/cloister-dev/cloister/services

go 1.26.0

require github.com/cloister-dev/cloister v0.0.0

replace github.com/cloister-dev/cloister => ../
