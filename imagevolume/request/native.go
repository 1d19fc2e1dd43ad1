package request

import "fmt"

// NativeExecDomain is the annotation domain that has programs in Kubernetes' own
// image volumes run. Its keys are those of Domain: /container.NAME, /pod and the
// bare one, of which the first that is there counts for a container.
const NativeExecDomain = "native-exec.ocihold.dev"

// NativeExec reports whether the pod wants programs in the container's native image
// volumes, those by Kubernetes' own field, to run. The value is "true" or "false";
// no annotation is false. A key of the domain that no container can have is a fault
// of the whole pod, as for Domain.
func NativeExec(pod Pod, annotations map[string]string, container string) (bool, error) {
	key, err := checkKeys(NativeExecDomain, annotations)
	exec := false
	if err == nil {
		if key = effectiveKey(NativeExecDomain, annotations, container); key == "" {
			return false, nil
		}
		switch value := annotations[key]; value {
		case "true":
			exec = true
		case "false":
		default:
			err = fmt.Errorf(`%s is neither "true" nor "false"`, quote(value))
		}
	}
	if err != nil {
		return false, fmt.Errorf("native image volumes of container %s of pod %s: annotation %s: %w",
			plain(container), pod, plain(key), err)
	}
	return exec, nil
}
