// SPDX-License-Identifier: Apache-2.0

// Package freeport finds ports on 127.0.0.1 for processes that are about to be
// started.
//
// Whoever closes a listener so that another process can take its port has lost it
// for a moment. Three things keep others from taking it then: the port is outside
// the range from which the kernel gives ports to connections and to listeners that
// ask for any; this process never gives it out twice; and a lock on a file of its
// number, held until this process ends, keeps other processes of the same user that
// use this package away. A program that knows nothing of this can still take it:
// the owner of the process asks for another port then.
package freeport
