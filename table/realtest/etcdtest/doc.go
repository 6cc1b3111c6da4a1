// SPDX-License-Identifier: Apache-2.0

// Package etcdtest runs real etcd servers inside a test's process, and a proxy that
// cuts a client off from them. Its own tests are those of package table/etcd.
//
// A server's data is below the test's temporary folder, it listens on free ports
// of the loopback, and it ends with the test. A server that does not start fails
// the test.
package etcdtest
