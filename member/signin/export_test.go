// SPDX-License-Identifier: Apache-2.0

package signin

// ParseIssuers is what ReadIssuers makes of a file.
var ParseIssuers = parseIssuers
