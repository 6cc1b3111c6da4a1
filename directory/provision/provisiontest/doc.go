// SPDX-License-Identifier: Apache-2.0

// Package provisiontest is the conformance suite of [provision.Provisioner]: every
// implementation passes it, against processes or against an API server, and [Mutants]
// shows that it notices implementations that are broken on purpose. It keeps no state;
// a case that fails leaves what its harness leaves.
package provisiontest
