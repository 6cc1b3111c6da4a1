// SPDX-License-Identifier: Apache-2.0

// Package serverstest starts real servers for the tests of a cell's stores: an S3
// server (versitygw on a folder) and ClickHouse (Debian's clickhouse-server). Each
// is a process of its own and ends with the test. It is in a module of its own since
// the S3 server brings many modules that nobody else needs.
package serverstest
