// SPDX-License-Identifier: Apache-2.0

// Package disk tells how much room a file system has. It is authoritative for
// nothing: what it says is true of the moment.
package disk

import "errors"

// ErrUnknown: this system does not say. Returned by Space.
var ErrUnknown = errors.New("disk: the room of a file system is not known on this system")
