// Package nriplugin connects image volumes to the container runtime through
// NRI: it passes the runtime's events on and turns answers into adjustments.
//
// The runtime holds one lock over the plugin calls of the whole node, and cuts
// a plugin off that takes longer than its request time-out. So no handler here
// waits for anything, and none calls the runtime; one that is held up all the same
// answers before that time is over, with an error that has the runtime try again. A connection that is lost is
// made again, for ever.
package nriplugin
