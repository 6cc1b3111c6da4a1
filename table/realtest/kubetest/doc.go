// SPDX-License-Identifier: Apache-2.0

// Package kubetest runs a real Kubernetes API server for custom resources inside a
// test's process: apiextensions-apiserver on an embedded etcd. It has what custom
// resources have in a cluster (schemas and CEL rules, the status subresource, field
// validation, watches with bookmarks, continue tokens) and nothing else: no
// namespaces that must exist, no roles, no webhooks. Its own tests are those of
// package table/kube.
//
// The server listens on the loopback, keeps its data below a folder that the caller
// gives, and ends with Close. A server that does not start is an error.
package kubetest
